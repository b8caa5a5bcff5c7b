"""The command line: one module per command. Heavy imports happen inside the commands, so that --help stays quick."""
