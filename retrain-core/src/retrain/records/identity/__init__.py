"""What a run consists of besides its configuration: hashes of its code, data, model files and plugins, and copies."""
