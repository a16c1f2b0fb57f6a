"""The `leanft` command. Each module implements one verb: it parses arguments, calls the library and prints."""
