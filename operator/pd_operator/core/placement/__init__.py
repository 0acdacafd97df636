"""Where replicas go: capacity, demand, the planner and its explanations (DESIGN §6). Pure and deterministic."""
