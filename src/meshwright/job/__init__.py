"""What the user asks for: the job file and the value types it is made of. Imports no torch."""
