"""Finding the settings that suit a machine, a model and a workload: many are tried, the better ones for longer."""
