"""From users' files to tokens: readers, tokenisation, batching."""
