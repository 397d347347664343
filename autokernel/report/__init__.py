"""What a run found, from results.tsv alone: on the terminal, as Markdown, as JSON."""
