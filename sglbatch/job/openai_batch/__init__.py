"""Files of OpenAI's Batch API on the local engine: a program over their lines, and their output format."""
