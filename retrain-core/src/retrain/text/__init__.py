"""Text and token ids: tokenizers, chat templates, transcripts of episodes, and text that is safe to show or to write.

Begin with `chat.py` (a conversation as token ids) and `transcript.py` (an episode). Imports only the kernel.
"""
