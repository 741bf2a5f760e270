"""Values and the planner: functions of integers and strings that use no files, no processes and no torch."""
