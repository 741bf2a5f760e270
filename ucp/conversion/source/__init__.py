"""What is done to the index of the source before a target plans: what is taken, under which names, and is it sound."""
