//! Bodies: one Rust expression to the calls of `foveate_mods::trace` that record it.
//!
//! The translation needs no types and almost no scopes: `let` stays `let`, and every name is
//! read through `trace::get`, which does the right thing for expressions, literals and
//! captures alike. What stays host code, evaluated as written when the mod is made, is what is
//! called in `same_document(doc)(q, kv)` (the part before the last argument list) and the
//! arguments of `constant(…)` and `scalar("name", …)`.

use std::collections::HashSet;

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{BinOp, Block, Error, Expr, Lit, Member, Pat, Stmt, Type, UnOp};

use crate::builtin;

type Result<T> = std::result::Result<T, Error>;

/// The translation of one body.
pub struct Body<'a> {
    krate: &'a TokenStream,
    /// Names bound by `let`: they hide functions of the same name.
    bound: HashSet<String>,
}

fn refuse<T>(span: Span, message: impl std::fmt::Display) -> Result<T> {
    Err(Error::new(span, message))
}

/// `Expr<T>` for one of the three types, or what to do instead.
fn element(ty: &Type) -> Result<&Type> {
    match ty {
        Type::Path(p) if ["i32", "f32", "bool"].iter().any(|t| p.path.is_ident(t)) => Ok(ty),
        other => refuse(other.span(), "a mod computes in i32, f32 and bool: write one of these"),
    }
}

impl<'a> Body<'a> {
    pub fn new(krate: &'a TokenStream) -> Self {
        Self { krate, bound: HashSet::new() }
    }

    /// The crate's path, shown at `span` in messages.
    fn krate_at(&self, span: Span) -> TokenStream {
        let at = |mut token: TokenTree| {
            token.set_span(token.span().located_at(span));
            token
        };
        self.krate.clone().into_iter().map(at).collect()
    }

    /// A call of `trace::name`.
    pub fn call(&self, span: Span, name: &str, args: &[TokenStream]) -> TokenStream {
        let name = syn::Ident::new(name, span);
        let krate = self.krate_at(span);
        quote_spanned!(span=> #krate::trace::#name(#(#args),*))
    }

    /// The expression `e` traces to.
    pub fn expr(&mut self, e: &Expr) -> Result<TokenStream> {
        let span = e.span();
        match e {
            Expr::Paren(x) => self.expr(&x.expr),
            Expr::Group(x) => self.expr(&x.expr),
            Expr::Reference(x) => self.expr(&x.expr),
            Expr::Block(x) if x.label.is_none() => self.block(&x.block),
            Expr::Lit(x) => self.literal(&x.lit, false),
            Expr::Path(x) => Ok(self.path(x)),
            Expr::Field(x) => {
                let name = match &x.member {
                    Member::Named(name) => name.to_string(),
                    Member::Unnamed(index) => format!("field{}", index.index),
                };
                Ok(self.call(span, "get", &[quote_spanned!(span=> &#x), quote!(#name)]))
            }
            Expr::Unary(x) => self.unary(x),
            Expr::Binary(x) => self.binary(x),
            Expr::Cast(x) => {
                let inner = self.expr(&x.expr)?;
                match &*x.ty {
                    Type::Path(p) if p.path.is_ident("f32") => {
                        Ok(self.call(span, "to_f32", &[inner]))
                    }
                    Type::Path(p) if p.path.is_ident("i32") => {
                        Ok(self.call(span, "to_i32", &[inner]))
                    }
                    other => refuse(other.span(), "a mod casts to f32 or i32 only"),
                }
            }
            Expr::If(x) => self.if_else(x),
            Expr::Index(_) => self.index(e),
            Expr::Call(x) => self.function(x),
            Expr::MethodCall(x) => self.method(x),
            Expr::Closure(x) => self.closure(x),
            Expr::Return(x) => refuse(
                x.return_token.span,
                "a mod has no `return`: its last expression is the result; choose with if/else",
            ),
            Expr::ForLoop(_) | Expr::While(_) | Expr::Loop(_) => refuse(
                span,
                "a mod has no loops: build it from mods in a loop around the macro, \
                 `mask = mask | other;`",
            ),
            Expr::Assign(_) => refuse(span, "a mod assigns nothing: bind a new name with `let`"),
            Expr::Match(_) | Expr::Let(_) => {
                refuse(span, "a mod has no patterns: compare with `==` and choose with if/else")
            }
            Expr::Try(_) => refuse(span, "a mod has no `?`: use it before the macro"),
            Expr::Macro(_) => refuse(
                span,
                "a macro is not traced: compute it before and capture the value, or call the mod \
                 it makes, `mask_mod!(…)(q, kv)`",
            ),
            Expr::Array(_) | Expr::Tuple(_) => refuse(
                span,
                "a mod computes single values; arrays and tuples stand only inside an index, \
                 `bias[[h, q]]`",
            ),
            _ => refuse(
                span,
                "not part of a mod, which is made of arithmetic, comparison, logic, if/else, let, \
                 casts, captured values, `buffer[index]` and calls; compute it before and capture it",
            ),
        }
    }

    fn block(&mut self, block: &Block) -> Result<TokenStream> {
        let Some((last, lets)) = block.stmts.split_last() else {
            return refuse(block.span(), "a mod computes a value: this block is empty");
        };
        let mut out = TokenStream::new();
        for stmt in lets {
            out.extend(self.binding(stmt)?);
        }
        let Stmt::Expr(value, None) = last else {
            // A diverging or assigning last statement has its own, better message.
            if let Stmt::Expr(e, Some(_)) = last {
                self.expr(e)?;
            }
            return refuse(
                last.span(),
                "a mod computes a value: end the block with an expression, without a semicolon",
            );
        };
        let value = self.expr(value)?;
        // A block without bindings is its value: the compiler then points at the value.
        Ok(if out.is_empty() { value } else { quote!({ #out #value }) })
    }

    fn binding(&mut self, stmt: &Stmt) -> Result<TokenStream> {
        let local = match stmt {
            Stmt::Local(local) => local,
            Stmt::Expr(e, _) => {
                self.expr(e)?;
                return refuse(stmt.span(), "a value that is not used: bind it with `let`");
            }
            other => {
                return refuse(other.span(), "not part of a mod: put items and macros before it");
            }
        };
        let Some(init) = local.init.as_ref().filter(|init| init.diverge.is_none()) else {
            return refuse(local.span(), "a mod binds each name to a value: `let name = value;`");
        };
        let (pat, ty) = match &local.pat {
            Pat::Type(typed) => (&*typed.pat, Some(element(&typed.ty)?)),
            pat => (pat, None),
        };
        let name = match pat {
            Pat::Ident(p) if p.mutability.is_none() && p.by_ref.is_none() => &p.ident,
            Pat::Ident(p) => {
                return refuse(p.span(), "values of a mod do not change: drop `mut` or `ref`");
            }
            other => return refuse(other.span(), "a mod binds single names: `let name = value;`"),
        };
        let value = self.expr(&init.expr)?;
        self.bound.insert(name.to_string());
        Ok(match ty {
            Some(ty) => {
                let krate = self.krate_at(init.expr.span());
                quote_spanned!(init.expr.span()=> let #name = #krate::trace::typed::<#ty, _>(#value);)
            }
            None => quote!(let #name = #value;),
        })
    }

    /// A literal; without a suffix it takes the type of what it is combined with.
    fn literal(&self, lit: &Lit, negative: bool) -> Result<TokenStream> {
        let span = lit.span();
        let krate = self.krate_at(span);
        let sign = if negative { "-" } else { "" };
        let adaptive = |kind: &str, value: TokenStream| {
            let kind = syn::Ident::new(kind, span);
            quote_spanned!(span=> #krate::trace::#kind(#value))
        };
        match lit {
            Lit::Bool(v) => Ok(self.call(span, "constant", &[quote!(#v)])),
            Lit::Int(v) if matches!(v.suffix(), "" | "i32") => {
                let Ok(value) = format!("{sign}{}", v.base10_digits()).parse::<i32>() else {
                    return refuse(
                        span,
                        "an integer of a mod is an i32; a float is written `1e10`",
                    );
                };
                let value = proc_macro2::Literal::i32_suffixed(value.wrapping_abs());
                let value = match format!("{sign}{}", v.base10_digits()).as_str() {
                    "-2147483648" => quote!(i32::MIN),
                    _ if negative => quote!(-#value),
                    _ => quote!(#value),
                };
                Ok(match v.suffix() {
                    "" => adaptive("Int", value),
                    _ => self.call(span, "constant", &[value]),
                })
            }
            Lit::Float(_) | Lit::Int(_) => {
                let (digits, suffix) = match lit {
                    Lit::Float(v) => (v.base10_digits(), v.suffix()),
                    Lit::Int(v) => (v.base10_digits(), v.suffix()),
                    _ => unreachable!("the arm takes floats and integers only"),
                };
                if !matches!(suffix, "" | "f32") {
                    return refuse(span, "a mod computes in i32 and f32: drop the suffix");
                }
                let value = digits.parse::<f32>().ok().filter(|v| v.is_finite());
                let Some(value) = value else {
                    return refuse(span, "a float of a mod is an f32; infinity is `f32::INFINITY`");
                };
                let value = proc_macro2::Literal::f32_suffixed(value);
                let value = if negative { quote!(-#value) } else { quote!(#value) };
                Ok(match suffix {
                    "" => adaptive("Float", value),
                    _ => self.call(span, "constant", &[value]),
                })
            }
            _ => refuse(span, "a mod has no text: its literals are integers, floats, true, false"),
        }
    }

    /// A name is captured; a constant by its path (`i32::MAX`, `WINDOW`) is part of the structure.
    fn path(&self, path: &syn::ExprPath) -> TokenStream {
        let span = path.span();
        match path.path.get_ident() {
            Some(name) if path.qself.is_none() => {
                let text = name.to_string();
                let upper = text.chars().any(|c| c.is_ascii_uppercase())
                    && !text.chars().any(|c| c.is_ascii_lowercase());
                if upper && !self.bound.contains(&text) {
                    self.call(span, "constant", &[quote!(#name)])
                } else {
                    self.call(span, "get", &[quote_spanned!(span=> &#name), quote!(#text)])
                }
            }
            _ => self.call(span, "constant", &[quote!(#path)]),
        }
    }

    fn unary(&mut self, x: &syn::ExprUnary) -> Result<TokenStream> {
        let name = match x.op {
            UnOp::Neg(_) => {
                if let Expr::Lit(lit) = &*x.expr
                    && matches!(lit.lit, Lit::Int(_) | Lit::Float(_))
                {
                    return self.literal(&lit.lit, true);
                }
                "neg"
            }
            UnOp::Not(_) => "not",
            UnOp::Deref(_) => return self.expr(&x.expr),
            _ => return refuse(x.span(), "not an operator of a mod"),
        };
        let inner = self.expr(&x.expr)?;
        Ok(self.call(x.span(), name, &[inner]))
    }

    fn binary(&mut self, x: &syn::ExprBinary) -> Result<TokenStream> {
        let name = match x.op {
            BinOp::Add(_) => "add",
            BinOp::Sub(_) => "sub",
            BinOp::Mul(_) => "mul",
            BinOp::Div(_) => "div",
            BinOp::Rem(_) => "rem",
            BinOp::And(_) => "and",
            BinOp::Or(_) => "or",
            BinOp::BitAnd(_) => "bit_and",
            BinOp::BitOr(_) => "bit_or",
            BinOp::BitXor(_) => "xor",
            BinOp::Eq(_) => "eq",
            BinOp::Ne(_) => "ne",
            BinOp::Lt(_) => "lt",
            BinOp::Le(_) => "le",
            BinOp::Gt(_) => "gt",
            BinOp::Ge(_) => "ge",
            BinOp::Shl(_) => "shl",
            BinOp::Shr(_) => "shr",
            _ => return refuse(x.op.span(), "a mod assigns nothing: bind a new name with `let`"),
        };
        let (left, right) = (self.expr(&x.left)?, self.expr(&x.right)?);
        Ok(self.call(x.op.span(), name, &[left, right]))
    }

    fn if_else(&mut self, x: &syn::ExprIf) -> Result<TokenStream> {
        if let Expr::Let(cond) = &*x.cond {
            return self.expr(&Expr::Let(cond.clone()));
        }
        let cond = self.expr(&x.cond)?;
        if let [Stmt::Expr(Expr::Return(early), _)] = x.then_branch.stmts.as_slice() {
            return self.expr(&Expr::Return(early.clone()));
        }
        let Some((_, other)) = &x.else_branch else {
            return refuse(x.if_token.span, "an `if` in a mod is a value: add an `else`");
        };
        let then = self.block(&x.then_branch)?;
        let other = self.expr(other)?;
        Ok(self.call(x.span(), "select", &[cond, then, other]))
    }

    /// `bias[h][q]`, `bias[[h, q]]` and `bias[(h, q)]` are the same.
    fn index(&mut self, e: &Expr) -> Result<TokenStream> {
        let mut base = e;
        let mut groups = Vec::new();
        while let Expr::Index(x) = base {
            groups.push(match &*x.index {
                Expr::Array(array) => array.elems.iter().collect::<Vec<_>>(),
                Expr::Tuple(tuple) => tuple.elems.iter().collect(),
                single => vec![single],
            });
            base = &x.expr;
        }
        let base = self.expr(base)?;
        let mut indices = Vec::new();
        for index in groups.iter().rev().flatten() {
            let value = self.expr(index)?;
            let krate = self.krate_at(index.span());
            indices.push(quote_spanned!(index.span()=> #krate::trace::typed::<i32, _>(#value)));
        }
        Ok(self.call(e.span(), "index", &[base, quote!([#(#indices),*])]))
    }

    fn function(&mut self, x: &syn::ExprCall) -> Result<TokenStream> {
        let span = x.span();
        if let Expr::Path(path) = &*x.func
            && let Some(name) = path.path.get_ident()
            && !self.bound.contains(&name.to_string())
        {
            let text = name.to_string();
            let args: Vec<_> = x.args.iter().collect();
            match (text.as_str(), args.as_slice()) {
                ("constant", [value]) => return Ok(self.call(span, "constant", &[quote!(#value)])),
                ("scalar", [label, value]) => {
                    return Ok(self.call(span, "scalar", &[quote!(#label), quote!(#value)]));
                }
                _ => {}
            }
            if let Some(found) = builtin::find(&text, args.len()) {
                return self.builtin(span, &text, found, &args);
            }
        }
        let callee = &x.func;
        self.value_of(span, quote!(#callee), x.args.iter())
    }

    fn builtin(
        &mut self,
        span: Span,
        name: &str,
        found: std::result::Result<&'static str, usize>,
        operands: &[&Expr],
    ) -> Result<TokenStream> {
        match found {
            Ok(function) => {
                let operands = operands.iter().map(|x| self.expr(x)).collect::<Result<Vec<_>>>()?;
                Ok(self.call(span, function, &operands))
            }
            Err(takes) => {
                refuse(span, format!("`{name}` takes {takes} operands, not {}", operands.len()))
            }
        }
    }

    /// The call of something that is host code: a mod, a function over expressions.
    fn value_of<'e>(
        &mut self,
        span: Span,
        callee: TokenStream,
        args: impl Iterator<Item = &'e Expr>,
    ) -> Result<TokenStream> {
        let krate = self.krate_at(span);
        let mut passed = Vec::new();
        for arg in args {
            let value = self.expr(arg)?;
            passed.push(self.call(arg.span(), "resolve", &[value]));
        }
        Ok(quote_spanned! { span=> {
            #[allow(unused_imports)]
            use #krate::trace::{CallFunction as _, CallMaker as _};
            #krate::trace::called(
                (&&&#krate::trace::Call { of: &#callee, args: &(#(#passed,)*) }).value()
            )
        }})
    }

    fn method(&mut self, x: &syn::ExprMethodCall) -> Result<TokenStream> {
        let name = x.method.to_string();
        if name == "clone" && x.args.is_empty() {
            return self.expr(&x.receiver);
        }
        let operands: Vec<_> = std::iter::once(&*x.receiver).chain(&x.args).collect();
        match builtin::find(&name, operands.len()) {
            Some(found) => self.builtin(x.span(), &name, found, &operands),
            None => refuse(
                x.method.span(),
                format!(
                    "`{name}` is not a method of a mod's values, which are {}; wrap a value that \
                     is known when the mod is made in `constant(…)` or `scalar(\"name\", …)`",
                    builtin::names()
                ),
            ),
        }
    }

    /// A closure over expressions, to be called in the same body.
    fn closure(&mut self, x: &syn::ExprClosure) -> Result<TokenStream> {
        let krate = self.krate;
        let mut params = Vec::new();
        for param in &x.inputs {
            let Pat::Type(typed) = param else {
                return refuse(
                    param.span(),
                    "a closure inside a mod says the types of its parameters: `|x: i32| …`",
                );
            };
            let (pat, ty) = (&typed.pat, element(&typed.ty)?);
            params.push(quote!(#pat: #krate::Expr<#ty>));
        }
        let value = self.expr(&x.body)?;
        let value = self.call(x.body.span(), "resolve", &[value]);
        Ok(quote!(|#(#params),*| #value))
    }
}
