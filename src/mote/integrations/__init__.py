"""Other libraries' embedding classes over a MoTE: one module per library, imported only when it is named."""
