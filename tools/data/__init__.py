"""Own text, documents and conversations to a folder of tokens.

sources     files, their stretches, their records
documents   a record to documents: text, and what of it counts
chat        conversations to text by a template
encoding    text to ids with a tokenizer.json
shards      a stretch to the files of a shard
prepare     all stretches, by several processes, again after a kill
"""
