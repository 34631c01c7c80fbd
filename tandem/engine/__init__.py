"""One model, one scheduler, one loop: requests in, tokens out."""
