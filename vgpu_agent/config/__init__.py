"""The configuration: every number and path of the agent, from defaults, one YAML file,
the environment and the flags.

`settings` defines the keys, `families` what each family adds to them, `options` those with a flag
or an environment variable, `load` puts the four together, `watch` notices a changed file. Called by
`cli` and `agent`. Every other package receives the section it needs.
"""
