"""The page that explains a translation in the browser; `vanilla-transformer explain` serves it."""
