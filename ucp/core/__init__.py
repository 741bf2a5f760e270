"""Values and the planner: integers and strings, which know no files, processes or torch."""
