"""A job becomes communication: the mesh of ranks, its groups, the collectives and their record."""
