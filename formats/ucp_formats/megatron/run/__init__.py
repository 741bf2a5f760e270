"""What a checkpoint says of the run that saved it: arguments, modules, family, sizes."""
