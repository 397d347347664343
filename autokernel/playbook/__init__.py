"""What is known to help: rewriting strategies, kernel starters and code generators. No LLM needed."""
