using System.Xml;
static class Validate {
    static void Main(string[] words) {
        var settings = new XmlReaderSettings { ValidationType = ValidationType.Schema };
        settings.Schemas.Add(null, words[0]);
        using (var reader = XmlReader.Create(words[1], settings)) while (reader.Read()) { }
    }
}
