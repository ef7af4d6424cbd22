"""Starting the ranks and what happens when they end."""
