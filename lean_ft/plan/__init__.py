"""The planner: what a recipe takes, known before it runs."""
