"""What the user wrote → frozen, validated, grouped settings.

`load` gives `Settings` or raises `ConfigErrors` with every problem at once. A component receives its own
group only.
"""

from evenflow.config.load import load
from evenflow.config.problems import ConfigErrors, Problem
from evenflow.config.secrets import Secret, key_digest
from evenflow.config.settings import (
    AuthSettings,
    FleetSettings,
    GroupSettings,
    LimitSettings,
    ListenSettings,
    LogSettings,
    SchedulingSettings,
    Settings,
    TenantLimits,
    TenantSettings,
    TierSettings,
    TimeoutSettings,
    WorkerSettings,
)

__all__ = [
    "AuthSettings",
    "ConfigErrors",
    "FleetSettings",
    "GroupSettings",
    "LimitSettings",
    "ListenSettings",
    "LogSettings",
    "Problem",
    "SchedulingSettings",
    "Secret",
    "Settings",
    "TenantLimits",
    "TenantSettings",
    "TierSettings",
    "TimeoutSettings",
    "WorkerSettings",
    "key_digest",
    "load",
]
