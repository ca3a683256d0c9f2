"""The paper's figures from one command: what each one measures, draws and says."""
