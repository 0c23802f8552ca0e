// Documents of JSON that this project wrote.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;
using System.Text;

/// A value of a document, absent if it is null.
struct Json {
    readonly object value;

    Json(object value) { this.value = value; }
    internal static Json Read(string path) {
        var (text, at) = (File.ReadAllText(path), 0);
        return new Json(Parse(text, ref at));
    }
    internal bool IsPresent => value != null;
    internal bool IsText => value is string;
    internal bool IsFlag => value is bool;
    internal Json this[string key] =>
        value is Dictionary<string, object> all && all.TryGetValue(key, out var found)
            ? new Json(found) : default(Json);
    internal IEnumerable<KeyValuePair<string, Json>> Object() =>
        ((Dictionary<string, object>)value ?? new Dictionary<string, object>())
        .Select(each => new KeyValuePair<string, Json>(each.Key, new Json(each.Value)));
    internal List<Json> List() =>
        ((List<object>)value ?? new List<object>()).ConvertAll(each => new Json(each));
    internal string Text(string otherwise = null) => (string)value ?? otherwise;
    internal bool Flag(bool otherwise) => value == null ? otherwise : (bool)value;
    internal double Real(double otherwise = double.NaN) => (double?)value ?? otherwise;
    internal long Whole(long otherwise = 0) => (long)Real(otherwise);
    internal long[] Wholes() => List().ConvertAll(each => each.Whole()).ToArray();

    [DllImport("libc")]
    static extern double strtod(string text, IntPtr end); // Mono's own is off by a bit at times

    static object Parse(string text, ref int at) {
        Skip(text, ref at);
        var first = text[at];
        if (first == '{' || first == '[') {
            var (all, list) = (new Dictionary<string, object>(), new List<object>());
            for (++at; ; ++at) {
                Skip(text, ref at);
                if (text[at] == '}' || text[at] == ']') break;
                if (text[at] == ',') continue;
                var item = Parse(text, ref at);
                if (first == '{') {
                    Skip(text, ref at);
                    ++at; // the colon
                    all[(string)item] = Parse(text, ref at);
                } else {
                    list.Add(item);
                }
                --at;
            }
            ++at;
            return first == '{' ? (object)all : list;
        }
        if (first == '"') return ParseText(text, ref at);
        var start = at;
        while (at < text.Length && (char.IsLetterOrDigit(text[at]) || "+-.".IndexOf(text[at]) >= 0))
            ++at;
        var word = text.Substring(start, at - start);
        return word == "null" ? null : word == "true" ? true : word == "false" ? (object)false
            : strtod(word, IntPtr.Zero);
    }
    static string ParseText(string text, ref int at) {
        var made = new StringBuilder();
        for (++at; text[at] != '"'; ++at) {
            if (text[at] != '\\') {
                made.Append(text[at]);
            } else if (text[++at] == 'u') {
                made.Append((char)Convert.ToInt32(text.Substring(at + 1, 4), 16));
                at += 4;
            } else {
                var escape = "bfnrt".IndexOf(text[at]);
                made.Append(escape < 0 ? text[at] : "\b\f\n\r\t"[escape]);
            }
        }
        ++at;
        return made.ToString();
    }
    static void Skip(string text, ref int at) {
        while (char.IsWhiteSpace(text[at])) ++at;
    }
}
