"""The scaling law: readings, learned numbers and bounds in; replica counts and their reasons out (DESIGN §7)."""
