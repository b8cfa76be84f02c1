"""What an author of plugins and extensions uses: the commands `elman new` and `elman check`, and the contract for tests."""
