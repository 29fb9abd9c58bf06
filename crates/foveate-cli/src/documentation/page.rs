//! A page: its anchors, links, and what it shows as code.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// A page of Markdown.
pub struct Page {
    /// Its path in the repository.
    pub name: String,
    anchors: Vec<String>,
    /// Lines and targets, as they are written.
    links: Vec<(usize, String)>,
    /// Lines and texts of inline code, of commands in blocks of the language `console` (without
    /// the `$`) and of words in blocks of the language `text`.
    shown: Vec<(usize, String)>,
    /// Lines of Rust, except of blocks that are never compiled.
    rust: Vec<String>,
}

impl Page {
    /// Reads a Markdown file, or the front page (`//!`) of a crate.
    pub fn read(root: &Path, file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let name = file.strip_prefix(root).expect("a file of the repository");
        let name = name.to_str().expect("a name in UTF-8");
        if !name.ends_with(".rs") {
            return Self::of(name, &text);
        }
        let front: Vec<&str> = text.lines().map_while(|line| line.strip_prefix("//!")).collect();
        let front: Vec<&str> =
            front.into_iter().map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
        Self::of(name, &front.join("\n"))
    }

    /// The page of this name and text.
    pub fn of(name: &str, text: &str) -> Self {
        let mut page = Self {
            name: name.to_owned(),
            anchors: vec![],
            links: vec![],
            shown: vec![],
            rust: vec![],
        };
        let mut used = HashMap::<String, usize>::new();
        let mut heading: Option<String> = None;
        let mut block: Option<String> = None;
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            let line = 1 + text[..range.start].matches('\n').count();
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let slug = slug(&heading.take().unwrap_or_default());
                    let again = used.entry(slug.clone()).or_default();
                    let anchor = if *again == 0 { slug } else { format!("{slug}-{again}") };
                    *again += 1;
                    page.anchors.push(anchor);
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.links.push((line, dest_url.into_string()));
                }
                Event::Html(html) | Event::InlineHtml(html) => {
                    let sources = html.split("src=\"").skip(1).filter_map(|s| s.split('"').next());
                    page.links.extend(sources.map(|target| (line, target.to_owned())));
                }
                Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) => {
                    block = Some(language.into_string());
                }
                Event::End(TagEnd::CodeBlock) => block = None,
                Event::Code(code) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&code);
                    }
                    page.shown.push((line, code.into_string()));
                }
                Event::Text(code) => match block.as_deref() {
                    Some("console") => page.shown.extend(commands(line, &code)),
                    Some("text") => page.shown.extend(words(line, &code)),
                    // What `cargo test` compiles: a front page's examples name no language.
                    Some("" | "rust" | "no_run") => {
                        page.rust.extend(code.lines().map(str::to_owned));
                    }
                    Some(_) => {}
                    None => {
                        if let Some(heading) = &mut heading {
                            heading.push_str(&code);
                        }
                    }
                },
                _ => {}
            }
        }
        page
    }

    /// Targets of links, as they are written.
    pub fn links(&self) -> impl Iterator<Item = &str> {
        self.links.iter().map(|(_, target)| target.as_str())
    }

    /// Lines and texts of code: see the field.
    pub fn shown(&self) -> impl Iterator<Item = (usize, &str)> {
        self.shown.iter().map(|(line, text)| (*line, text.as_str()))
    }

    /// Lines of Rust: see the field.
    pub fn rust(&self) -> impl Iterator<Item = &str> {
        self.rust.iter().map(String::as_str)
    }

    /// What is wrong with the links to files and anchors. The pages of `docs/` are a book, so they
    /// link to one another only; links of front pages are Rust's, which `cargo doc` checks.
    pub fn broken_links(&self, pages: &[Page], root: &Path) -> Vec<String> {
        let folder = Path::new(&self.name).parent().expect("a file is in a folder");
        let wrong = |target: &str| {
            if self.name.ends_with(".rs") || target.contains("://") {
                return None;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = match file {
                "" => self.name.clone(),
                file => normal(&folder.join(file)),
            };
            if !root.join(&path).exists() {
                return Some(format!("there is no {path}"));
            }
            if self.name.starts_with("docs/") && !path.starts_with("docs/") {
                return Some(format!("{path} is not a part of the book"));
            }
            let page = pages.iter().find(|page| page.name == path);
            let missing = !anchor.is_empty()
                && !page.is_some_and(|page| page.anchors.iter().any(|a| a == anchor));
            missing.then(|| format!("{path} has no heading #{anchor}"))
        };
        let say = |line: &usize, target: &str, said| {
            format!("{}:{line}: the link {target}: {said}", self.name)
        };
        self.links.iter().filter_map(|(line, t)| wrong(t).map(|said| say(line, t, said))).collect()
    }
}

/// A relative path without `..`, as the repository names it.
fn normal(path: &Path) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.to_str().expect("a link in UTF-8").split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The anchor of a heading, as GitHub and mdBook make it.
fn slug(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Commands of a console block, those over several lines joined.
fn commands(line: usize, block: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut goes_on = false;
    for (i, text) in block.lines().enumerate() {
        let (text, more) = match text.strip_suffix('\\') {
            Some(text) => (text, true),
            None => (text, false),
        };
        if let Some(command) = text.strip_prefix("$ ") {
            found.push((line + i, command.to_owned()));
        } else if goes_on && let Some((_, command)) = found.last_mut() {
            command.push_str(text);
        }
        goes_on = more;
    }
    found
}

fn words(line: usize, block: &str) -> Vec<(usize, String)> {
    let lines = block.lines().enumerate();
    lines.flat_map(|(i, l)| l.split_whitespace().map(move |w| (line + i, w.to_owned()))).collect()
}

#[test]
fn links_that_lead_nowhere_are_found() {
    let text = "# A b: `c`\n\n# A b: `c`\n\n[1](#a-b-c) [2](#a-b-c-1) [3](#a-b-c-2) [4](x.md)\n\
                [5](semantics.md#forward) [6](semantics.md#backwards) [7](../README.md)\n\n\
                <img src=\"images/none.svg\">\n";
    let root = super::root();
    let pages = [Page::of("docs/a.md", text), Page::read(&root, &root.join("docs/semantics.md"))];
    let said = pages[0].broken_links(&pages, &root).join("\n");
    // The page itself is not on the disk, so none of its own anchors is looked for before.
    assert_eq!(said.lines().count(), 7, "{said}");
    assert!(
        said.contains("docs/a.md:6: the link semantics.md#backwards: docs/semantics.md has no")
    );
    assert!(!said.contains("semantics.md#forward:"), "{said}");
}

#[test]
fn commands_over_several_lines_are_one() {
    let page = Page::of("a.md", "x `b c`\n\n```console\n$ a \\\n    --b\nout\n$ c\n```\n");
    let shown: Vec<_> = page.shown().collect();
    assert_eq!(shown, [(1, "b c"), (4, "a     --b"), (7, "c")]);
}
