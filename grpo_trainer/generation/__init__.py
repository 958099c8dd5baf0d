"""How completions are drawn. Nothing here knows of rewards, advantages or losses."""
