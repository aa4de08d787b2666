"""gptcli: a microscope for GPT checkpoints."""

__version__ = "0.1.0"
