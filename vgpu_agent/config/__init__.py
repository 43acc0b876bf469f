"""Where every number and path of the agent comes from: defaults, one YAML file, the environment, the flags.

`settings` says what there is, `options` which of it has a flag or an environment variable, `load` puts the four together, `watch` notices
a changed file. Called by `cli` and `agent`; every other room is handed the section it needs.
"""
