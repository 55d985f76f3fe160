//! What was changed on the host and has to be changed back: rules, settings, DNS. The interface itself goes away
//! with its file descriptor, and its addresses and routes go with it. Filled by `up` and `routing`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::dns;
use crate::netlink::{Netlink, Rule};

/// The changes made so far. Dropping it takes them back, the latest first: so every way out of `up`, by error
/// or by signal, leaves nothing behind.
#[derive(Debug, Default)]
pub(crate) struct Undo(Vec<Change>);

#[derive(Debug)]
enum Change {
    Rule(Rule),
    Sysctl { path: PathBuf, before: String },
    Dns { interface: String },
}

impl Undo {
    /// A rule was added.
    pub(crate) fn rule(&mut self, rule: Rule) {
        self.0.push(Change::Rule(rule));
    }

    /// `resolvconf` was told about servers for `interface`.
    pub(crate) fn dns(&mut self, interface: &str) {
        self.0.push(Change::Dns { interface: interface.to_owned() });
    }

    /// Writes `value` into a file below /proc/sys, unless it is there already, and remembers what was there.
    ///
    /// # Errors
    /// When the file is not there or cannot be written (a container without the right to).
    pub(crate) fn sysctl(&mut self, path: &Path, value: &str) -> io::Result<()> {
        let before = fs::read_to_string(path)?.trim_end().to_owned();
        if before != value {
            fs::write(path, value)?;
            self.0.push(Change::Sysctl { path: path.to_owned(), before });
        }
        Ok(())
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        while let Some(change) = self.0.pop() {
            if let Err(problem) = take_back(&change) {
                log::warn!("{problem}");
            }
        }
    }
}

fn take_back(change: &Change) -> Result<(), String> {
    match change {
        Change::Rule(rule) => match Netlink::open().and_then(|mut netlink| netlink.delete_rule(rule)) {
            Err(error) if !error.missing() => Err(error.to_string()),
            _ => Ok(()),
        },
        Change::Sysctl { path, before } => fs::write(path, before)
            .map_err(|e| format!("cannot set {} back to {before}: {e}", path.display())),
        Change::Dns { interface } => {
            dns::unset(interface).map_err(|e| format!("cannot take back the DNS servers of {interface}: {e}"))
        }
    }
}
