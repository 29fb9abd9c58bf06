//! The path under which an attribute names `foveate_mods`.
//!
//! An attribute has no `$crate`, so the manifest of the crate being compiled decides: with
//! `foveate-mods` among its dependencies it is `::foveate_mods`, otherwise the re-export
//! `::foveate::mods`. A crate that renamed its dependency says `#[mask_mod(crate = path)]`.

use proc_macro2::TokenStream;
use quote::quote;

/// The path for the crate being compiled.
pub fn detect() -> TokenStream {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR");
    let manifest = folder
        .and_then(|f| std::fs::read_to_string(std::path::Path::new(&f).join("Cargo.toml")).ok());
    match manifest {
        Some(text) if names_mods(&text) => quote!(::foveate_mods),
        _ => quote!(::foveate::mods),
    }
}

/// True when the manifest is that of foveate-mods, or depends on it.
fn names_mods(manifest: &str) -> bool {
    let mut table = "";
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            table = line.trim_matches(['[', ']']).trim();
            if table.strip_suffix("foveate-mods").is_some_and(|t| t.ends_with("dependencies.")) {
                return true;
            }
        } else if let Some((key, value)) = line.split_once('=') {
            let key = key.split('.').next().unwrap_or(key).trim().trim_matches('"');
            let depends = table.ends_with("dependencies") && key == "foveate-mods";
            let is = table == "package" && key == "name" && value.trim() == "\"foveate-mods\"";
            if depends || is {
                return true;
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::names_mods;

    #[test]
    fn every_way_to_write_the_dependency_is_found() {
        for text in [
            "[dependencies]\nfoveate-mods = \"0.1\"",
            "[dependencies]\nfoveate-mods.workspace = true",
            "[dev-dependencies]\n  foveate-mods = { path = \"../foveate-mods\" }",
            "[dependencies.foveate-mods]\nversion = \"0.1\"",
            "[target.'cfg(unix)'.dependencies]\n\"foveate-mods\" = \"0.1\"",
            "[package]\nname = \"foveate-mods\"",
        ] {
            assert!(names_mods(text), "{text}");
        }
    }

    #[test]
    fn a_crate_that_knows_foveate_only_goes_through_it() {
        for text in [
            "[package]\nname = \"mine\"\n[dependencies]\nfoveate = \"0.1\"",
            "[package]\ndescription = \"like foveate-mods\"",
            "[features]\nfoveate-mods = []",
            "",
        ] {
            assert!(!names_mods(text), "{text}");
        }
    }
}
