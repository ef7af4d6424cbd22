"""Training with a parameter server: the processes, their models and optimizers, and what a run leaves behind."""
