"""Moving bytes: tasks, the worker that carries one out, and the engines that run many."""
