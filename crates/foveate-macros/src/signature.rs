//! Parameters: which are coordinates, which are captures, and the mod that is made of both.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use quote::{quote, quote_spanned};
use syn::parse::{Parse, ParseStream, Parser};
use syn::spanned::Spanned;
use syn::{Error, Expr, ExprClosure, FnArg, Ident, ItemFn, Pat, Path, ReturnType, Token, Type};

use crate::body::Body;
use crate::crate_path;

/// What is made.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    /// A `MaskMod`.
    Mask,
    /// A `ScoreMod`.
    Score,
}

impl Kind {
    fn result(self) -> &'static str {
        match self {
            Kind::Mask => "bool",
            Kind::Score => "f32",
        }
    }
}

const COORDINATES: [&str; 7] = ["b", "h", "h_kv", "q", "kv", "q_len", "kv_len"];

/// A coordinate or the score among the parameters.
struct Leaf {
    name: Ident,
}

impl Leaf {
    /// The leaf called `name`, or `None` when there is none.
    fn find(kind: Kind, name: &Ident, ty: Option<&Type>) -> Result<Option<Self>, Error> {
        let is_score = name == "score";
        if !is_score && !COORDINATES.iter().any(|c| name == c) {
            return Ok(None);
        }
        if is_score && kind == Kind::Mask {
            return Err(Error::new(
                name.span(),
                "a mask cannot read the score; make a score function with `score_mod`",
            ));
        }
        let wanted = if is_score { "f32" } else { "i32" };
        if let Some(ty) = ty.filter(|ty| !is(ty, wanted) && !matches!(ty, Type::Infer(_))) {
            let what = if is_score { "the score" } else { "a coordinate" };
            return Err(Error::new(
                ty.span(),
                format!("{what} is an {wanted}: write `{name}: {wanted}`, or rename the capture"),
            ));
        }
        Ok(Some(Self { name: name.clone() }))
    }
}

/// What a number that is no coordinate was probably meant to be: another spelling of one
/// (`kvlen`, `KV`), what other programs call one (`key`, `kv_idx`), or a slip of the hand in a
/// long name (`kv_lan`). Taken for a capture it would silently be one value for all positions.
fn meant(name: &str, ty: &Type) -> Option<&'static str> {
    let plain = |name: &str| name.replace('_', "").to_lowercase();
    let wanted: &[&'static str] = match () {
        () if is(ty, "i32") => &COORDINATES,
        () if is(ty, "f32") => &["score"],
        () => return None,
    };
    let usual = match name.to_lowercase().as_str() {
        "k" | "key" | "keys" | "k_idx" | "kv_idx" | "k_pos" | "kv_pos" | "vk" => "kv",
        "query" | "queries" | "q_idx" | "q_pos" => "q",
        "batch" => "b",
        "head" => "h",
        "kv_head" | "h_k" => "h_kv",
        "len_q" => "q_len",
        "k_len" | "len_k" | "len_kv" => "kv_len",
        "scores" => "score",
        _ => "",
    };
    let spelt = |known: &&&str| {
        let long = known.len() >= 4 && name.len() >= 4;
        **known == usual || plain(name) == plain(known) || long && is_one_edit(name, known)
    };
    wanted.iter().find(spelt).copied()
}

/// Whether one character was put in, left out or replaced.
fn is_one_edit(name: &str, known: &str) -> bool {
    let (name, known): (Vec<char>, Vec<char>) = (name.chars().collect(), known.chars().collect());
    let same = name.iter().zip(&known).take_while(|(x, y)| x == y).count();
    let (rest, known_rest) = (&name[same..], &known[same..]);
    match name.len().cmp(&known.len()) {
        _ if name.len().abs_diff(known.len()) > 1 => false,
        std::cmp::Ordering::Less => known_rest[1..] == *rest,
        std::cmp::Ordering::Equal => rest.get(1..) == known_rest.get(1..),
        std::cmp::Ordering::Greater => rest[1..] == *known_rest,
    }
}

fn is(ty: &Type, name: &str) -> bool {
    matches!(ty, Type::Path(p) if p.qself.is_none() && p.path.is_ident(name))
}

/// `{ let q = q(); …; mask(body) }`.
fn assemble(
    krate: &TokenStream,
    kind: Kind,
    leaves: &[Leaf],
    extra: TokenStream,
    body: &Expr,
) -> Result<TokenStream, Error> {
    let mut translation = Body::new(krate);
    let value = translation.expr(body)?;
    let bind = leaves.iter().map(|Leaf { name }| {
        quote! { #[allow(unused_variables)] let #name = #krate::expr::#name(); }
    });
    let finish = match kind {
        Kind::Mask => "mask",
        Kind::Score => "score",
    };
    let made = translation.call(result_span(body), finish, &[value]);
    Ok(quote! {{ #(#bind)* #extra #made }})
}

/// Where the result of a body stands.
fn result_span(body: &Expr) -> proc_macro2::Span {
    match body {
        Expr::Block(block) => block.block.stmts.last().map_or(body.span(), Spanned::span),
        other => other.span(),
    }
}

/// The attributes on functions.
pub fn function(kind: Kind, args: TokenStream, item: TokenStream) -> TokenStream {
    try_function(kind, args, item).unwrap_or_else(Error::into_compile_error)
}

fn try_function(kind: Kind, args: TokenStream, item: TokenStream) -> Result<TokenStream, Error> {
    let krate = (|input: ParseStream| {
        if input.is_empty() {
            return Ok(crate_path::detect());
        }
        input.parse::<Token![crate]>()?;
        input.parse::<Token![=]>()?;
        let path = input.call(Path::parse_mod_style)?;
        Ok(quote!(#path))
    })
    .parse2(args)?;
    let mut item: ItemFn = syn::parse2(item)?;
    let result = kind.result();
    match &item.sig.output {
        ReturnType::Type(_, ty) if is(ty, result) => {}
        other => {
            let what = if kind == Kind::Mask { "mask" } else { "score function" };
            let span = match other {
                ReturnType::Default => item.sig.ident.span(),
                ReturnType::Type(_, ty) => ty.span(),
            };
            return Err(Error::new(
                span,
                format!("a {what} returns {result}: write `-> {result}`"),
            ));
        }
    }
    let mut leaves = Vec::new();
    let mut captures = syn::punctuated::Punctuated::<FnArg, Token![,]>::new();
    let mut constants = Vec::new();
    for input in &item.sig.inputs {
        let mut input = input.clone();
        if let FnArg::Typed(typed) = &mut input {
            let Pat::Ident(pat) = &*typed.pat else {
                return Err(Error::new(typed.pat.span(), "a parameter of a mod is a plain name"));
            };
            if let Some(leaf) = Leaf::find(kind, &pat.ident, Some(&typed.ty))? {
                leaves.push(leaf);
                continue;
            }
            let mut take = |attribute: &str| {
                let before = typed.attrs.len();
                typed.attrs.retain(|a| !a.path().is_ident(attribute));
                typed.attrs.len() < before
            };
            let (constant, scalar) = (take("constant"), take("scalar"));
            if !constant
                && !scalar
                && let Some(meant) = meant(&pat.ident.to_string(), &typed.ty)
            {
                let name = &pat.ident;
                return Err(Error::new(
                    name.span(),
                    format!(
                        "`{name}` is not a coordinate but a captured number, one value for all \
                         positions; write `{meant}` for the coordinate, or `#[scalar] {name}` for \
                         the number"
                    ),
                ));
            }
            if constant {
                let name = &pat.ident;
                constants.push(quote_spanned! { name.span()=>
                    let #name = #krate::trace::constant(#name);
                });
            }
        }
        captures.push(input);
    }
    let body = Expr::Block(syn::ExprBlock { attrs: vec![], label: None, block: *item.block });
    let block = assemble(&krate, kind, &leaves, quote!(#(#constants)*), &body)?;
    item.sig.inputs = captures;
    let made = match kind {
        Kind::Mask => quote!(#krate::MaskMod),
        Kind::Score => quote!(#krate::ScoreMod),
    };
    let (attrs, vis, mut sig) = (&item.attrs, &item.vis, item.sig);
    sig.output = syn::parse2(quote!(-> #made))?;
    Ok(quote! { #(#attrs)* #vis #sig #block })
}

struct Closure {
    krate: TokenStream,
    closure: ExprClosure,
}

impl Parse for Closure {
    fn parse(input: ParseStream) -> Result<Self, Error> {
        let krate = match input.parse::<TokenTree>()? {
            TokenTree::Group(g) if g.delimiter() == Delimiter::Bracket => g.stream(),
            other => return Err(Error::new(other.span(), "expected the crate's path in brackets")),
        };
        let rest = with_index_brackets(input.parse()?);
        let closure = match (|input: ParseStream| {
            let closure = input.parse::<Expr>()?;
            input.parse::<Option<Token![,]>>()?;
            Ok(closure)
        })
        .parse2(rest)
        {
            Ok(Expr::Closure(closure)) => closure,
            Ok(other) => {
                return Err(Error::new(other.span(), "expected a closure: `|q, kv| q >= kv`"));
            }
            Err(e) => return Err(e),
        };
        Ok(Self { krate, closure })
    }
}

/// `bias[[h, q]]` for `bias[h, q]`, which is not Rust but how the text form and arrays are
/// indexed. Brackets that follow a name or other brackets index it.
fn with_index_brackets(tokens: TokenStream) -> TokenStream {
    let mut indexes = false;
    let rewrite = |token: TokenTree| {
        let TokenTree::Group(group) = token else {
            indexes = matches!(token, TokenTree::Ident(_));
            return token;
        };
        let mut inner = with_index_brackets(group.stream());
        let is_comma = |t: TokenTree| matches!(t, TokenTree::Punct(p) if p.as_char() == ',');
        let brackets = group.delimiter() == Delimiter::Bracket;
        if indexes && brackets && inner.clone().into_iter().any(is_comma) {
            let mut pair = Group::new(Delimiter::Bracket, inner);
            pair.set_span(group.span());
            inner = TokenTree::Group(pair).into();
        }
        indexes = group.delimiter() != Delimiter::Brace;
        let mut rewritten = Group::new(group.delimiter(), inner);
        rewritten.set_span(group.span());
        TokenTree::Group(rewritten)
    };
    tokens.into_iter().map(rewrite).collect()
}

/// The macros around closures.
pub fn closure(kind: Kind, input: TokenStream) -> TokenStream {
    try_closure(kind, input).unwrap_or_else(Error::into_compile_error)
}

fn try_closure(kind: Kind, input: TokenStream) -> Result<TokenStream, Error> {
    let Closure { krate, closure } = syn::parse2(input)?;
    if let ReturnType::Type(_, ty) = &closure.output
        && !is(ty, kind.result())
    {
        return Err(Error::new(ty.span(), format!("this closure returns {}", kind.result())));
    }
    let mut leaves = Vec::new();
    for param in &closure.inputs {
        let (pat, ty) = match param {
            Pat::Type(typed) => (&*typed.pat, Some(&*typed.ty)),
            pat => (pat, None),
        };
        let name = match pat {
            Pat::Ident(p) => &p.ident,
            Pat::Wild(_) => continue,
            other => return Err(Error::new(other.span(), "a parameter of a mod is a plain name")),
        };
        leaves.push(Leaf::find(kind, name, ty)?.ok_or_else(|| {
            Error::new(
                name.span(),
                format!(
                    "`{name}` is not a coordinate: they are {}{}; variables around the closure \
                     are captured without being parameters",
                    if kind == Kind::Score { "score, " } else { "" },
                    COORDINATES.join(", ")
                ),
            )
        })?);
    }
    assemble(&krate, kind, &leaves, TokenStream::new(), &closure.body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_looks_like_a_coordinate_is_found() {
        let found = |name: &str, ty: &str| meant(name, &syn::parse_str(ty).expect("a type"));
        for (name, coordinate) in [
            ("k", "kv"),
            ("kv_idx", "kv"),
            ("KV", "kv"),
            ("query", "q"),
            ("kvlen", "kv_len"),
            ("kv_lan", "kv_len"),
            ("kv_lenn", "kv_len"),
            ("q_le", "q_len"),
            ("hkv", "h_kv"),
        ] {
            assert_eq!(found(name, "i32"), Some(coordinate), "{name}");
        }
        assert_eq!(found("scores", "f32"), Some("score"));
        assert_eq!(found("scire", "f32"), Some("score"));
        for (name, ty) in [("n", "i32"), ("size", "i32"), ("window", "i32"), ("k", "f32")] {
            assert_eq!(found(name, ty), None, "{name}");
        }
        assert_eq!(found("k", "&Buffer<i32>"), None);
    }

    #[test]
    fn commas_in_an_index_become_an_array() {
        let rewritten = |text: &str| {
            let tokens: TokenStream = text.parse().expect("tokens");
            with_index_brackets(tokens).to_string().replace(' ', "")
        };
        assert_eq!(rewritten("bias[h, q - kv]"), "bias[[h,q-kv]]");
        assert_eq!(rewritten("bias[doc[h, q], q]"), "bias[[doc[[h,q]],q]]");
        assert_eq!(rewritten("bias[[h, q]] + bias[h][q]"), "bias[[h,q]]+bias[h][q]");
        assert_eq!(rewritten("f([h, q])"), "f([h,q])");
    }
}
