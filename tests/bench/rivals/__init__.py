"""Loading into live engines beside what their own projects load with."""
