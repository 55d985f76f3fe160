//! One line of what the doctor says.

use std::fmt::Write as _;

use serde::Serialize;

/// How good or bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// As it should be.
    Ok,
    /// Switched off by whoever started fv.
    Off,
    /// Not to be had here; it works without, slower.
    No,
    /// Worth knowing, and often harmless.
    Note,
    /// Looks wrong.
    Look,
    /// Without this there is no tunnel.
    Fail,
}

impl State {
    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Off => "off",
            Self::No => "no",
            Self::Note => "note",
            Self::Look => "LOOK",
            Self::Fail => "FAIL",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) what: String,
    pub(super) state: State,
    pub(super) text: String,
    /// What to do, where something can be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) advice: Option<String>,
}

impl Finding {
    pub(super) fn new(what: &str, state: State, text: impl Into<String>) -> Self {
        Self { what: what.into(), state, text: text.into(), advice: None }
    }

    pub(super) fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into()).filter(|advice| !advice.is_empty());
        self
    }
}

/// A line for each, the advice behind an arrow.
pub(super) fn lines(findings: &[Finding]) -> String {
    let mut out = String::new();
    let width = findings.iter().map(|finding| finding.what.len()).max().unwrap_or(0);
    for Finding { what, state, text, advice } in findings {
        let _ = write!(out, "  {:<4}  {what:width$}  {text}", state.word());
        if let Some(advice) = advice {
            let _ = write!(out, " -> {advice}");
        }
        out.push('\n');
    }
    out
}
