//! What a package needs from the definition of the command line: manual pages and completions for shells.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::Cli;

/// The shells that packages have a place for.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Writes the manual pages (`fv.8`, `fv-up.8`, …) and the completions (`fv.bash`, `_fv`, `fv.fish`) into `folder`, which is
/// made if need be.
///
/// # Errors
/// The folder cannot be written to.
pub(crate) fn write(folder: &Path) -> Result<(), String> {
    let failed = |e: io::Error| format!("cannot write to {}: {e}", folder.display());
    fs::create_dir_all(folder).map_err(failed)?;
    let mut command = Cli::command();
    command.build();
    pages(&command, folder).map_err(failed)?;
    for shell in SHELLS {
        clap_complete::generate_to(shell, &mut Cli::command(), "fv", folder).map_err(failed)?;
    }
    Ok(())
}

/// A page of section 8 for the program, and one for each of its commands that is shown.
fn pages(command: &clap::Command, folder: &Path) -> io::Result<()> {
    let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    for page in shown.chain([command]) {
        // Of a command it is both names, with a dash.
        let name = page.get_display_name().unwrap_or("fv").to_owned();
        let mut file = File::create(folder.join(format!("{name}.8")))?;
        let page = page.clone().version(env!("CARGO_PKG_VERSION"));
        clap_mangen::Man::new(page).section("8").render(&mut file)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_that_is_shown_has_a_page_and_each_shell_its_completions() {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path()).expect("written");
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).expect("it is there");
        for (page, words) in [
            ("fv.8", "\\-\\-threads"),
            ("fv-up.8", "wg\\-quick"),
            ("fv-doctor.8", "\\-\\-json"),
            ("fv-health.8", "handshake"),
            ("fv-show.8", "IFNAME"),
        ] {
            assert!(read(page).contains(words), "{page}: {}", read(page));
            assert!(read(page).starts_with(".ie"), "roff");
        }
        for (name, words) in [("fv.bash", "doctor"), ("_fv", "doctor"), ("fv.fish", "doctor")] {
            assert!(read(name).contains(words), "{name}");
        }
        let files = fs::read_dir(folder.path()).expect("a folder").count();
        let commands = Cli::command().get_subcommands().filter(|sub| !sub.is_hide_set()).count();
        assert_eq!(files, 1 + commands + SHELLS.len(), "nothing hidden has a page");
        let error = write(Path::new("/dev/null/x")).expect_err("no folder");
        assert!(error.starts_with("cannot write to /dev/null/x"), "{error}");
    }
}
