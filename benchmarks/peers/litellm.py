"""The LiteLLM proxy: Python, without its database."""

from lab import install, package_version

from peers.peer import Peer, Site, Start

# Releases that steal credentials, or are reported to: pip must not be left to choose.
REFUSED = {"litellm": ("1.82.7", "1.82.8", "1.107.0")}
VERSION = "1.106.12"
CONFIGURATION = """\
model_list:
{models}
router_settings: {{routing_strategy: simple-shuffle}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
litellm_settings: {{telemetry: false, request_timeout: 600, drop_params: true}}
"""


def prepare(site: Site) -> Start:
    programs = install("litellm", [f"litellm[proxy]=={VERSION}"], refused=REFUSED)
    models = "\n".join(
        f"  - model_name: mock\n    litellm_params: {{model: openai/mock, api_base: {url}/v1, api_key: none}}"
        for url in site.worker_urls
    )
    path = site.directory / "litellm.yaml"
    path.write_text(CONFIGURATION.format(models=models))
    command = (
        str(programs / "litellm"),
        *("--config", str(path), "--host", "127.0.0.1", "--port", str(site.port)),
        *("--num_workers", "1", "--telemetry", "False"),
    )
    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
    }
    return Start(command, package_version(programs, "litellm"), environment)


PEERS = (
    Peer(
        "litellm",
        "LiteLLM proxy, Python",
        prepare,
        startup_s=120.0,
        paced_streams=10,
        open_streams=500,
        opening_s=20.0,
    ),
)
