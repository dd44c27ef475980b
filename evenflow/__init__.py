"""Evenflow: a fair gateway in front of engines that speak the OpenAI API."""

__version__ = "0.1.0"
