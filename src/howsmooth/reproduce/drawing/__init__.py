"""Pictures of the experiments, drawn from what was measured; nothing here measures."""
