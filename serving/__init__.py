"""HTTP server with the API of LibreTranslate: `vanilla-transformer serve MODEL...`."""
