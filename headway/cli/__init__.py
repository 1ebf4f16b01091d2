"""The `headway` command; each subcommand lives in a module of its own and is imported only when it is called."""
