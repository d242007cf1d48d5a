"""From TOML, environment and command line to one resolved configuration that knows where every value came from."""
