"""Moving bytes: tasks, the worker that carries out a task, and the engines that run all of them."""
