"""The networks, their initialisation, and Hugging Face names in and out."""
