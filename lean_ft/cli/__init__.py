"""The `leanft` command: one module a verb, each of which parses, calls the library and prints."""
