"""The command line, `python -m jax_flash`; `import jax_flash` does not import it."""
