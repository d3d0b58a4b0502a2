// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Extracts the examples of the crate `kite` that need a node: doc tests with `no_run`.
//!
//! # Operation
//!
//! The result is a Rust file with a function for each example, and the table `EXAMPLES` of names and functions. A name
//! is the source file and the item that the example documents, such as "lock.rs LockGuard". Examples of a module have
//! the name of its file only.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// Keywords before the name of an item.
const ITEMS: [&str; 7] = ["const", "enum", "fn", "mod", "struct", "trait", "type"];

/// An example.
struct Example {
    name: String,
    code: String,
}

/// Writes the examples in the sources of the folder `src` to `out`.
pub(crate) fn extract(src: &Path, out: &Path) -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={}", src.display());
    let mut examples = Vec::new();
    for file in sources(src)? {
        let name = file.strip_prefix(src)?.display().to_string();
        examples.extend(examples_of(&name, &fs::read_to_string(&file)?));
    }
    let names: BTreeSet<_> = examples.iter().map(|example| &example.name).collect();
    assert_eq!(names.len(), examples.len(), "two examples of one item");
    fs::write(out, table(&examples)?)?;
    Ok(())
}

/// Returns the Rust files of a folder and its subfolders, in order.
fn sources(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match path.extension() {
            None => files.extend(sources(&path)?),
            Some(extension) if extension == "rs" => files.push(path),
            Some(_) => (),
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the examples of a source file.
fn examples_of(file: &str, text: &str) -> Vec<Example> {
    let mut examples = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if !comment(line).is_some_and(|line| line.starts_with("```no_run")) {
            continue;
        }
        let code = lines
            .by_ref()
            .map_while(comment)
            .take_while(|line| !line.starts_with("```"))
            .map(shown)
            .collect();
        let name = match line.trim_start().starts_with("//!") {
            true => file.into(),
            false => format!(
                "{file} {}",
                lines.clone().find_map(item).unwrap_or_default()
            ),
        };
        examples.push(Example { name, code });
    }
    examples
}

/// Returns the text of a line of a documentation comment.
fn comment(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line.strip_prefix("///").or(line.strip_prefix("//!"))?;
    Some(text.strip_prefix(' ').unwrap_or(text))
}

/// Returns a line of code, also if rustdoc hides the line.
fn shown(line: &str) -> String {
    let code = match line.trim_start() {
        "#" => "",
        hidden => hidden.strip_prefix("# ").unwrap_or(line),
    };
    format!("    {code}\n")
}

/// Returns the name of the item that a line of code declares.
fn item(line: &str) -> Option<&str> {
    let line = line.trim_start();
    if line.starts_with("//") || line.starts_with('#') {
        return None;
    }
    let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.find(|word| ITEMS.contains(word))?;
    words.find(|word| !ITEMS.contains(word))
}

/// Returns the source of the functions and their table.
fn table(examples: &[Example]) -> Result<String, std::fmt::Error> {
    let (mut functions, mut rows) = (String::new(), String::new());
    for (number, Example { name, code }) in examples.iter().enumerate() {
        let main = if code.contains("fn main()") {
            "    main()\n"
        } else {
            ""
        };
        writeln!(
            functions,
            "\nfn example_{number}() -> kite::Result<()> {{\n{code}{main}}}"
        )?;
        writeln!(rows, "    ({name:?}, example_{number}),")?;
    }
    Ok(format!(
        "/// Function of an example.\n\
         type Example = fn() -> kite::Result<()>;\n\n\
         /// Names and functions of the examples.\n\
         const EXAMPLES: &[(&str, Example)] = &[\n{rows}];\n{functions}"
    ))
}
