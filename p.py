from libretranslatepy import LibreTranslateAPI

client = LibreTranslateAPI("http://127.0.0.1:5000")
print(client.languages())
print(client.translate("Anna gets up at 7:00 AM every day.", "en", "de"))
