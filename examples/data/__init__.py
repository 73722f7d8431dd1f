"""Small real data, described in README.md; in the package as `mote.example_data`."""
