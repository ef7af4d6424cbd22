"""meshwright: spread the training of a large model over many devices, and know beforehand what it costs."""

__version__ = "0.1.0"
